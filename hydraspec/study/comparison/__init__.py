"""Paired comparison of runs over the same prompts. Reads run folders, and runs nothing."""
