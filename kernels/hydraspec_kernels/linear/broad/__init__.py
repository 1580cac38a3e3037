"""Linears of so many rows that reading x costs as much as reading the weights."""
