"""Tests of robustdist.learners."""
