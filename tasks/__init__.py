"""Task definitions, one TOML file a data set; read by :mod:`ifsl_bench.protocols.tasks.task_files`."""
