"""What every other room stands on. Nothing here knows about models or data.

locks       a lock that is a file
ranks       which rank this is, what the ranks tell each other, how far long work is
refused     an error in words, the one place where it ends the program, and args.json
modules     the model inside an engine, and how many weights it has
statistics  statistics that a run reports
"""
