/* Decoding of messages. Pure functions of bytes: no system calls but the clock. */
#include "plan.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum plan_tag {
    TAG_NAME = 1,
    TAG_LAYER_PATH = 2,
    TAG_LAYER_FD = 3,
    TAG_UPPER_MEMORY = 4,
    TAG_UPPER_LOOP = 5,
    TAG_BIND = 6,
    TAG_HOSTNAME = 7,
    TAG_LIMITS = 8,
    TAG_CAPABILITIES = 9,
    TAG_SECCOMP = 10,
    TAG_NETWORK = 11,
    TAG_SHM = 12,
    TAG_FLAGS = 13,
    TAG_DEADLINE = 14,
    TAG_PROGRAM = 15,
    TAG_TOOL = 16,
    TAG_FILE = 17,
    TAG_LOG_FD = 18,
};

enum config_tag { TAG_EDGE = 1, TAG_CGROUP = 2, TAG_NUMBERS = 3, TAG_OUTLIVES = 4 };

struct field {
    unsigned tag;
    const unsigned char *bytes;
    uint32_t length;
};

static uint64_t get(const unsigned char *bytes, unsigned count) {
    uint64_t value = 0;
    for (unsigned i = 0; i < count; i++) value |= (uint64_t)bytes[i] << (8 * i);
    return value;
}

/* Takes the next field off `*data`. Returns 1, 0 at the end, -1 when the message is malformed. */
static int next_field(const unsigned char **data, size_t *left, struct field *field) {
    if (*left == 0) return 0;
    if (*left < 6) return -1;
    field->tag = (unsigned)get(*data, 2);
    field->length = (uint32_t)get(*data + 2, 4);
    field->bytes = *data + 6;
    if (field->length > *left - 6) return -1;
    *data += 6 + field->length;
    *left -= 6 + field->length;
    return 1;
}

/* A text field is sent with its terminating zero; any other zero inside is refused. */
static const char *text(const struct field *field, size_t longest) {
    if (field->length < 2 || field->length > longest + 1) return NULL;
    if (memchr(field->bytes, 0, field->length) != field->bytes + field->length - 1) return NULL;
    return (const char *)field->bytes;
}

/* Names become directory names in cgroup trees: letters, digits, dash and underscore only. */
static int plain_name(const char *name) {
    return name != NULL && name[strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")] == '\0';
}

static int parse_bind(const struct field *field, struct plan *plan) {
    if (plan->bind_count == BINDS_MAX || field->length < 4 || field->bytes[field->length - 1] != 0) return -1;
    const char *source = (const char *)field->bytes;
    size_t length = strlen(source);
    if (length + 1 >= field->length) return -1;
    const char *target = source + length + 1;
    if (length + 1 + strlen(target) + 1 != field->length || target[0] != '/') return -1;
    int is_tool = field->tag == TAG_TOOL, is_empty = !is_tool && strcmp(source, "-") == 0;
    if (!is_empty && source[0] != '/') return -1;
    if (is_tool && !plain_name(target + 1)) return -1;
    plan->binds[plan->bind_count++] = (struct plan_bind){.source = is_empty ? NULL : source, .target = target, .is_tool = is_tool};
    return 0;
}

static int parse_program(const struct field *field, struct plan *plan) {
    const char *bytes = (const char *)field->bytes;
    if (field->length < 2 || bytes[0] != '/' || bytes[field->length - 1] != '\0' || plan->program != NULL) return -1;
    for (uint32_t i = 0; i < field->length; i++) plan->program_words += bytes[i] == '\0';
    plan->program = bytes;
    return plan->program_words <= PROGRAM_WORDS_MAX ? 0 : -1;
}

static int parse_file(const struct field *field, struct plan *plan) {
    const unsigned char *end = memchr(field->bytes, 0, field->length);
    if (end == NULL || plan->file_name != NULL) return -1;
    plan->file_name = (const char *)field->bytes;
    plan->file = end + 1;
    plan->file_size = field->length - (size_t)(end + 1 - field->bytes);
    return strchr(plan->file_name, '/') == NULL && strlen(plan->file_name) < NAME_MAX_BYTES ? 0 : -1;
}

static int parse_seccomp(const struct field *field, struct plan *plan) {
    size_t count = field->length / sizeof(struct sock_filter);
    if (field->length % sizeof(struct sock_filter) != 0 || count == 0 || count > SECCOMP_MAX) return -1;
    plan->seccomp = (const struct sock_filter *)(const void *)field->bytes;
    plan->seccomp_count = (uint16_t)count;
    return 0;
}

static int parse_layer(const struct field *field, struct plan *plan) {
    if (plan->layer_count == LAYERS_MAX) return -1;
    struct plan_layer *layer = &plan->layers[plan->layer_count++];
    if (field->tag == TAG_LAYER_FD) {
        layer->fd_index = field->length == 4 ? (uint32_t)get(field->bytes, 4) : UINT32_MAX;
        return layer->fd_index < MESSAGE_FDS_MAX ? 0 : -1;
    }
    layer->path = text(field, 4095);
    return layer->path != NULL && layer->path[0] == '/' ? 0 : -1;
}

static int parse_numbers(const struct field *field, struct plan *plan) {
    const unsigned char *bytes = field->bytes;
    switch (field->tag) {
    case TAG_UPPER_MEMORY:
        if (field->length != 16 || plan->upper != UPPER_NONE) return -1;
        plan->upper = UPPER_MEMORY;
        plan->upper_bytes = get(bytes, 8);
        plan->upper_inodes = get(bytes + 8, 8);
        return 0;
    case TAG_LIMITS:
        if (field->length != 32) return -1;
        plan->memory_bytes = get(bytes, 8);
        plan->cpu_quota_us = get(bytes + 8, 8);
        plan->cpu_period_us = get(bytes + 16, 8);
        plan->pids = get(bytes + 24, 8);
        return 0;
    case TAG_CAPABILITIES:
        if (field->length != 8) return -1;
        plan->capabilities = get(bytes, 8);
        return 0;
    case TAG_SHM:
        if (field->length != 8) return -1;
        plan->shm_bytes = get(bytes, 8);
        return 0;
    case TAG_DEADLINE:
        if (field->length != 8) return -1;
        plan->deadline_ms = get(bytes, 8);
        return 0;
    case TAG_NETWORK:
        if (field->length != 4 || get(bytes, 4) > NETWORK_OPEN) return -1;
        plan->network = (enum network_kind)get(bytes, 4);
        return 0;
    case TAG_LOG_FD:
        if (field->length != 4 || get(bytes, 4) >= MESSAGE_FDS_MAX) return -1;
        plan->log_fd_index = (uint32_t)get(bytes, 4);
        return 0;
    default: /* TAG_FLAGS */
        if (field->length != 4 || (get(bytes, 4) & ~(uint64_t)(PLAN_FORCE_PATHS | PLAN_DURABLE)) != 0) return -1;
        plan->flags = (uint32_t)get(bytes, 4);
        return 0;
    }
}

static int parse_plan_field(const struct field *field, struct plan *plan) {
    switch (field->tag) {
    case TAG_NAME:
        plan->name = text(field, NAME_MAX_BYTES - 1);
        return plain_name(plan->name) ? 0 : -1;
    case TAG_HOSTNAME:
        plan->hostname = text(field, NAME_MAX_BYTES - 1);
        return plan->hostname != NULL ? 0 : -1;
    case TAG_LAYER_PATH:
    case TAG_LAYER_FD: return parse_layer(field, plan);
    case TAG_UPPER_LOOP:
        plan->upper_path = text(field, 4095);
        if (plan->upper != UPPER_NONE || plan->upper_path == NULL || plan->upper_path[0] != '/') return -1;
        plan->upper = UPPER_LOOP;
        return 0;
    case TAG_BIND:
    case TAG_TOOL: return parse_bind(field, plan);
    case TAG_PROGRAM: return parse_program(field, plan);
    case TAG_FILE: return parse_file(field, plan);
    case TAG_SECCOMP: return parse_seccomp(field, plan);
    case TAG_UPPER_MEMORY:
    case TAG_LIMITS:
    case TAG_CAPABILITIES:
    case TAG_SHM:
    case TAG_NETWORK:
    case TAG_DEADLINE:
    case TAG_LOG_FD:
    case TAG_FLAGS: return parse_numbers(field, plan);
    default: return -1;
    }
}

int plan_parse(const unsigned char *data, size_t size, struct plan *plan, struct failure *failure) {
    memset(plan, 0, sizeof *plan);
    struct field field;
    int more;
    while ((more = next_field(&data, &size, &field)) > 0) {
        if (parse_plan_field(&field, plan) < 0) return fail(failure, "plan-field", EBADMSG);
    }
    if (more < 0) return fail(failure, "plan-framing", EBADMSG);
    if (plan->name == NULL || plan->hostname == NULL || plan->layer_count == 0 || plan->upper == UPPER_NONE ||
        plan->seccomp == NULL || plan->memory_bytes == 0 || plan->pids == 0 || plan->cpu_period_us == 0)
        return fail(failure, "plan-incomplete", EBADMSG);
    if (plan->program != NULL && plan->file_name == NULL) return fail(failure, "plan-program", EBADMSG);
    return 0;
}

static int parse_config_field(const struct field *field, struct config *config) {
    if (field->tag == TAG_EDGE) {
        config->edge = text(field, NAME_MAX_BYTES - 1);
        return plain_name(config->edge) ? 0 : -1;
    }
    if (field->tag == TAG_CGROUP) {
        if (config->cgroup_count == CGROUPS_MAX || field->length < 3 || field->bytes[field->length - 1] != 0) return -1;
        struct config_cgroup *group = &config->cgroups[config->cgroup_count++];
        group->controllers = (const char *)field->bytes;
        size_t length = strlen(group->controllers);
        if (length + 1 >= field->length) return -1;
        group->path = group->controllers + length + 1;
        return length + 1 + strlen(group->path) + 1 == field->length ? 0 : -1;
    }
    if (field->tag == TAG_NUMBERS && field->length == 16) {
        config->pool = (uint32_t)get(field->bytes, 4);
        config->uid_start = (uint32_t)get(field->bytes + 4, 4);
        config->uid_ranges = (uint32_t)get(field->bytes + 8, 4);
        config->guest_uid = (uint32_t)get(field->bytes + 12, 4);
        return 0;
    }
    if (field->tag == TAG_OUTLIVES && field->length == 0) {
        config->is_durable = 1;
        return 0;
    }
    return -1;
}

int config_parse(const unsigned char *data, size_t size, struct config *config, struct failure *failure) {
    memset(config, 0, sizeof *config);
    struct field field;
    int more;
    while ((more = next_field(&data, &size, &field)) > 0) {
        if (parse_config_field(&field, config) < 0) return fail(failure, "config-field", EBADMSG);
    }
    if (more < 0 || config->edge == NULL || config->pool == 0 || config->uid_ranges == 0 || config->cgroup_count == 0)
        return fail(failure, "config-incomplete", EBADMSG);
    uint64_t last = (uint64_t)config->uid_start + (uint64_t)config->uid_ranges * 65536;
    uint64_t last_guest = (uint64_t)config->guest_uid + config->uid_ranges;
    int overlap = config->guest_uid < last && last_guest > config->uid_start;
    if (config->uid_start < 65536 || last > 0x7fffffff || config->guest_uid < 65536 || last_guest > 0x7fffffff || overlap)
        return fail(failure, "config-ids", EINVAL);
    return 0;
}

static uint64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

void words_start(struct words *words) {
    words->used = 0;
    words->text[0] = '\0';
    words->mark_ns = now_ns();
}

void words_add(struct words *words, const char *name, const char *value) {
    size_t room = sizeof words->text - words->used;
    int length = snprintf(words->text + words->used, room, "%s=%s ", name, value);
    if (length > 0 && (size_t)length < room) words->used += (size_t)length;
    words->text[words->used] = '\0';
}

void words_step(struct words *words, const char *name) {
    uint64_t now = now_ns();
    char value[24];
    snprintf(value, sizeof value, "%llu", (unsigned long long)((now - words->mark_ns) / 1000));
    words->mark_ns = now;
    words_add(words, name, value);
}
