"""What benchmarks share: options, timing, shapes, reports, baselines, figures."""
