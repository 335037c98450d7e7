"""What a run stands on: processes, devices, files, console and errors."""
