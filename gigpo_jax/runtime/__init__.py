"""Infrastructure of a run: processes, devices, files, console and errors."""
