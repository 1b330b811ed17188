"""Reports on runs: facts, comparisons, pictures, pages and exports."""
