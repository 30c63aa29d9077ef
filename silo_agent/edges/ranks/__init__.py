"""A silo's training in processes of its own: started, told what to train, watched, ended."""
