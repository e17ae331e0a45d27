"""Storms: many clients, too small a pool, and every answer compared with a quiet server's (README.md)."""
