"""Other numbers of drafts and other rules, replayed from what a run recorded. Runs nothing."""
