"""Decisions: numbers in, a plan out. Pure and deterministic; no TensorFlow import."""
