"""Diagnosis of a drafter with low acceptance: each of its conventions is changed in turn, its
weights are checked, and acceptance is compared on texts that the target wrote.
"""
