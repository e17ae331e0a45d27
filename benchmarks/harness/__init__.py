"""What benchmarks share: servers, pools, errors, the machine, tables and plots."""
