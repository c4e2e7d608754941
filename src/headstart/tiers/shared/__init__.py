"""The shared tier's store layer: sealed objects of many servers in one store. docs/shared.md describes it.

Read in this order: `store` (the contract), `names`, `keys`, `envelope`, `folder`, `resp`, `valkey`, `s3`, `address` (which
store a URL means). Nothing here is imported on a server without `--shared`.
"""
