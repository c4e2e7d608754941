"""What the tests of the shared tier share."""

OWNER, OTHER = b"owner  1", b"owner  2"
