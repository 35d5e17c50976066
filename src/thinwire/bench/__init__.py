"""Training runs that measure what an exchange costs: workloads, methods, one engine, tables and reports.

``thinwire demo`` and ``thinwire bench`` are this package behind a command line.
"""
