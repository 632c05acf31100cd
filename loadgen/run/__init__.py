"""Running a workload: processes, pacing, recording. Nothing is formatted or added up while a run is on."""
