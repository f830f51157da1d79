/* A device filter in eBPF, written by hand: one program per Edge, inherited by every group below its directory. */
#include "devices.h"

#include <linux/bpf.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LOAD(to, field) \
    {.code = BPF_LDX | BPF_MEM | BPF_W, .dst_reg = (to), .src_reg = BPF_REG_1, .off = offsetof(struct bpf_cgroup_dev_ctx, field)}
#define MOVE(to, from) {.code = BPF_ALU64 | BPF_MOV | BPF_X, .dst_reg = (to), .src_reg = (from)}
#define SET(to, value) {.code = BPF_ALU64 | BPF_MOV | BPF_K, .dst_reg = (to), .imm = (value)}
#define AND(to, value) {.code = BPF_ALU64 | BPF_AND | BPF_K, .dst_reg = (to), .imm = (value)}
#define IF_EQUAL(reg, value, skip) {.code = BPF_JMP | BPF_JEQ | BPF_K, .dst_reg = (reg), .off = (skip), .imm = (value)}
#define IF_OTHER(reg, value, skip) {.code = BPF_JMP | BPF_JNE | BPF_K, .dst_reg = (reg), .off = (skip), .imm = (value)}
#define RETURN {.code = BPF_JMP | BPF_EXIT}

enum { ACCESS = BPF_REG_2, KIND = BPF_REG_3, MAJOR = BPF_REG_4, MINOR = BPF_REG_5, MAKE_NODE = BPF_DEVCG_ACC_MKNOD << 16 };

/* Jumps count the instructions that they skip; `deny` is the pair at 16, `allow` the pair at 18. */
static const struct bpf_insn program[] = {
    /*  0 */ LOAD(ACCESS, access_type), /* access << 16 | kind */
    /*  1 */ MOVE(KIND, ACCESS),
    /*  2 */ AND(ACCESS, MAKE_NODE),
    /*  3 */ IF_OTHER(ACCESS, 0, 12),
    /*  4 */ AND(KIND, 0xffff),
    /*  5 */ IF_OTHER(KIND, BPF_DEVCG_DEV_CHAR, 10),
    /*  6 */ LOAD(MAJOR, major),
    /*  7 */ LOAD(MINOR, minor),
    /*  8 */ IF_EQUAL(MAJOR, 136, 9), /* pseudo-terminals */
    /*  9 */ IF_EQUAL(MAJOR, 5, 10),  /* tty, ptmx: to 20 */
    /* 10 */ IF_OTHER(MAJOR, 1, 5),
    /* 11 */ IF_EQUAL(MINOR, 3, 6), /* null */
    /* 12 */ IF_EQUAL(MINOR, 5, 5), /* zero */
    /* 13 */ IF_EQUAL(MINOR, 7, 4), /* full */
    /* 14 */ IF_EQUAL(MINOR, 8, 3), /* random */
    /* 15 */ IF_EQUAL(MINOR, 9, 2), /* urandom */
    /* 16 */ SET(BPF_REG_0, 0),
    /* 17 */ RETURN,
    /* 18 */ SET(BPF_REG_0, 1),
    /* 19 */ RETURN,
    /* 20 */ IF_EQUAL(MINOR, 0, -3),
    /* 21 */ IF_EQUAL(MINOR, 2, -4),
    /* 22 */ SET(BPF_REG_0, 0),
    /* 23 */ RETURN,
};

int devices_confine(int cgroup) {
    static const char license[] = "Apache-2.0";
    union bpf_attr load, attach;
    memset(&load, 0, sizeof load);
    load.prog_type = BPF_PROG_TYPE_CGROUP_DEVICE;
    load.insns = (uint64_t)(uintptr_t)program;
    load.insn_cnt = sizeof program / sizeof *program;
    load.license = (uint64_t)(uintptr_t)license;
    int filter = (int)syscall(SYS_bpf, BPF_PROG_LOAD, &load, sizeof load);
    if (filter < 0) return -1;
    memset(&attach, 0, sizeof attach);
    attach.target_fd = (uint32_t)cgroup;
    attach.attach_bpf_fd = (uint32_t)filter;
    attach.attach_type = BPF_CGROUP_DEVICE;
    attach.attach_flags = BPF_F_ALLOW_MULTI;
    int result = (int)syscall(SYS_bpf, BPF_PROG_ATTACH, &attach, sizeof attach);
    close(filter); /* the group holds it from now on */
    return result;
}
