"""Several processes (ranks) that run one engine: their layout, exchanges, start, end and faults."""
