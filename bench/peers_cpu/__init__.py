"""radixrt beside other engines on the CPU: one client, one set of workloads, one checkpoint."""
