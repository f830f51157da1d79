/* Which device files the processes of a cgroup2 directory may open. */
#ifndef PROCTOR_DEVICES_H
#define PROCTOR_DEVICES_H

/* Confines everything below the cgroup2 directory `cgroup` to null, zero, full, random, urandom, tty, ptmx and pseudo-terminals,
 * and forbids making device nodes. Returns 0, or -1 and errno where the kernel or the machine does not allow it; then
 * nodev mounts and the missing CAP_MKNOD stand alone. */
int devices_confine(int cgroup);

#endif
