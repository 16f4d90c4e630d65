"""Workbench."""
