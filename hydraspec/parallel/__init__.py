"""Several processes that run one engine: who is who, and what they add up and hand over."""
