"""`python -m headstart` is `headstart`."""

from headstart.cli.main import main

main()
