"""Benchmarks on emulated hosts."""
