"""The page of a study: means, intervals, tables and pictures of the runs that are done."""
