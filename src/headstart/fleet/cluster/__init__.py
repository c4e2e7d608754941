"""A fleet on Ray Serve. This package alone imports Ray, and only `headstart fleet` imports this package.

Read `setup`, `member`, `replica`, then `gateway` (handle mode) or `direct` (direct mode), `application`, `launch`.
"""
