"""What every room needs: errors, files on disk, progress, seeds and training states."""
