"""Expected speedups for every number of drafts and concurrency, from measured step costs."""
