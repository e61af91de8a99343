"""Reports from run folders: one run on a page (`write_report`), several against each other (`write_comparison`).

Importing this package is cheap; matplotlib is loaded by the modules that draw.
"""
