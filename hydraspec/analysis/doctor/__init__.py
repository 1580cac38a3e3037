"""Why drafts are rejected: a drafter's conventions, each tried otherwise on the target's texts."""
