"""What every other room stands on. Nothing here knows about models or data.

locks       a lock that is a file
ranks       which rank this is, what the ranks tell each other, how far long work is
refused     an error in words, and the one place where it ends the program
modules     the model inside an engine, and how many weights it has
records     args.json, in which a run notes its flags
statistics  statistics that a run reports
"""
