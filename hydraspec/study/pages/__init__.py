"""A report over any number of runs: groups, figures, blocks, and the page and W&B report of them.

A block is added by a function from a `groups.Group` to a `blocks.Block`, listed in contents.py.
"""
