"""Pictures of the pages: each module draws one SVG file from code, or from files of the repository."""
