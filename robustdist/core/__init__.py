"""Mechanisms shared by all packages; knows torch, not Lightning."""
