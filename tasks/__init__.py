"""Task definitions, one TOML file a data set; read by :mod:`ifsl_bench.task_files`."""
