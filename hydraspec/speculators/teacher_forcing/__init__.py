"""A drafter over texts that the target wrote: every draft reads the target's own tokens."""
