"""Replays of a run's recorded drafts under other numbers of drafts and other rules."""
