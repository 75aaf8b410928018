"""Tests of robustdist.domains."""
