"""Rounds and the drivers that perform them."""
