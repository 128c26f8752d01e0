"""Things from outside the project: methods, families and tasks that a run names as "package.module:Name"."""
