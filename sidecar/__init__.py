"""A local reverse proxy that gives any e-mail API idempotency."""

__version__ = "0.1.0"
