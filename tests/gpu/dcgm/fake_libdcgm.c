/* A libdcgm without DCGM: the functions podgpu calls, with NVIDIA's layouts written out once more, in C.
 *
 * A test tells it what the node looks like through fake_* functions. It is strict where DCGM is: a wrong version word,
 * an unknown handle, more than 128 fields in a group or a reading of what is not watched are refused with DCGM's codes.
 */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#define OK 0
#define BADPARAM (-1)
#define NOT_SUPPORTED (-6)
#define UNINITIALIZED (-10)
#define VER_MISMATCH (-12)
#define UNKNOWN_FIELD (-13)
#define NO_DATA (-14)
#define NOT_WATCHED (-16)
#define CONNECTION_NOT_VALID (-21)
#define MAX_LIMIT (-24)
#define FUNCTION_NOT_FOUND (-20)
#define VERSION(type, number) ((uint32_t)(sizeof(type) | ((uint32_t)(number) << 24)))

typedef struct { int32_t group; uint32_t id; } pair_t;
typedef struct { uint32_t version, persist, timeout_ms, is_unix; } connect_v2_t;
typedef struct {
    uint32_t version; int mode; uintptr_t handle; const char *log_file; int severity; uint32_t denied; uint32_t deny[10];
} embedded_v1_t;
typedef struct { uint32_t version; char text[512]; } version_info_t;
typedef union { int64_t i64; double dbl; char str[256]; char blob[4096]; } payload_t;
typedef struct { uint32_t version; uint16_t field, type; int32_t status; int64_t ts; payload_t value; } value_v1_t;
typedef struct {
    uint32_t version; int32_t group; uint32_t id; uint16_t field, type; int32_t status; uint32_t unused; int64_t ts;
    payload_t value;
} value_v2_t;
typedef struct {
    pair_t entity, parent; char uuid[128]; uint32_t nvml_index, gi, ci, profile, slices;
} mig_entry_t;
typedef struct { uint32_t version, count; mig_entry_t entries[448]; } mig_t;
typedef struct {
    uint32_t version; char brand[256], name[256], pci[256], serial[256], uuid[256], vbios[256], inforom[256];
    uint32_t pci_device, pci_subsystem; char driver[256]; uint32_t virtualization;
} identifiers_t;
typedef struct {
    uint32_t version; char clocks[3080]; uint32_t thermal[3], power[6]; identifiers_t ids; uint32_t memory[5], settings[4];
} attributes_t;
typedef struct { uint32_t system; int32_t health; char message[1024]; uint32_t code; pair_t entity; } incident_t;
typedef struct { uint32_t version; int32_t overall; uint32_t count; incident_t incidents[64]; } health_v4_t;
typedef struct { uint32_t version; int32_t overall; uint32_t count; incident_t incidents[1024]; } health_v5_t;
typedef struct { uint32_t id; int32_t states[18]; } gpu_links_t;
typedef struct { uint32_t id; int32_t states[256]; } switch_links_t;
typedef struct {
    uint32_t version, gpus_n; gpu_links_t gpus[32]; uint32_t switches_n; switch_links_t switches[12];
} links_v4_t;
typedef struct { uint32_t id; int32_t states[32]; } peers_t;
typedef struct { uint32_t version, gpus_n; peers_t gpus[32]; } p2p_t;
typedef struct { uint32_t version; uint64_t bits[16]; } owned_cores_t;
typedef struct { uint32_t id; owned_cores_t cores; } cpu_t;
typedef struct { uint32_t version, count; cpu_t cpus[8]; } cpu_hierarchy_t;

/* -- what the test says ----------------------------------------------------------------------------------------- */

#define MOST 4096
typedef struct { pair_t entity; uint16_t field, type; int32_t status; int64_t ts; int live_only; payload_t value; } sample_t;

static char library_version[64] = "4.2.3", engine_version[64] = "4.2.3";
static int connect_code, embedded_code, initialised, connection, alive, tries;
static uint32_t gpus_n, states[32];
static attributes_t gpus[32];
static mig_t migs;
static links_v4_t links;
static p2p_t p2p;
static cpu_hierarchy_t cpus;
static health_v5_t health;
static sample_t samples[MOST];
static int samples_n;
static value_v1_t xids[256];
static pair_t xid_entities[256];
static int xids_n;
static int health_set;
static uint16_t refused[64];
static int refused_code[64], refused_n;
static uint32_t switches[12], switches_n;
static char address[256];
static int address_is_unix, severity, persist;
static char missing[64];

typedef struct { int used; pair_t entities[64]; int n; } group_t;
typedef struct { int used; uint16_t fields[128]; int n; } field_group_t;
typedef struct { int group, fields; int64_t every_us; double keep; int most; } watch_t;
static group_t groups[65];
static field_group_t field_groups[65];
static watch_t watches[512];
static int watches_n, largest_group, groups_made, field_groups_made, updates, reads, live_reads;

static void forget_groups(void) {
    memset(groups, 0, sizeof groups);
    memset(field_groups, 0, sizeof field_groups);
    watches_n = health_set = 0;
}

API void fake_reset(void) {
    strcpy(library_version, "4.2.3");
    strcpy(engine_version, "4.2.3");
    connect_code = embedded_code = initialised = connection = alive = tries = 0;
    gpus_n = switches_n = 0;
    samples_n = xids_n = refused_n = largest_group = groups_made = field_groups_made = updates = reads = live_reads = 0;
    memset(&migs, 0, sizeof migs);
    memset(&links, 0, sizeof links);
    memset(&p2p, 0, sizeof p2p);
    memset(&cpus, 0, sizeof cpus);
    memset(&health, 0, sizeof health);
    memset(states, 0, sizeof states);
    memset(missing, 0, sizeof missing);
    address[0] = 0;
    address_is_unix = severity = persist = -1;
    forget_groups();
}
API void fake_versions(const char *library, const char *engine) {
    snprintf(library_version, sizeof library_version, "%s", library);
    snprintf(engine_version, sizeof engine_version, "%s", engine);
}
API void fake_connect_code(int code) { connect_code = embedded_code = code; }
API void fake_lack(const char *function) { snprintf(missing, sizeof missing, "%s", function); }
/* The other end goes away: everything made over the connection goes with it. */
API void fake_disconnect(void) { alive = 0; forget_groups(); }
API void fake_gpu(uint32_t id, const char *uuid, const char *pci, const char *name, int mig) {
    attributes_t *gpu = &gpus[id];
    memset(gpu, 0, sizeof *gpu);
    snprintf(gpu->ids.uuid, 256, "%s", uuid);
    snprintf(gpu->ids.pci, 256, "%s", pci);
    snprintf(gpu->ids.name, 256, "%s", name);
    gpu->settings[2] = mig;
    if (id >= gpus_n) gpus_n = id + 1;
    states[id] = 1;
}
API void fake_gpu_state(uint32_t id, uint32_t state) { states[id] = state; }
API void fake_mig(int group, uint32_t id, int parent_group, uint32_t parent, uint32_t gi, uint32_t ci) {
    mig_entry_t *e = &migs.entries[migs.count++];
    memset(e, 0, sizeof *e);
    e->entity.group = group, e->entity.id = id, e->parent.group = parent_group, e->parent.id = parent;
    e->gi = gi, e->ci = ci;
}
API void fake_no_migs(void) { migs.count = 0; }
static sample_t *sample(int group, uint32_t id, uint16_t field, int64_t ts, int status, int live_only) {
    sample_t *s = 0;
    for (int i = 0; i < samples_n; i++)
        if (samples[i].entity.group == group && samples[i].entity.id == id && samples[i].field == field) s = &samples[i];
    if (!s) s = &samples[samples_n++];
    memset(s, 0, sizeof *s);
    s->entity.group = group, s->entity.id = id, s->field = field, s->ts = ts, s->status = status;
    s->live_only = live_only;
    return s;
}
API void fake_int(int group, uint32_t id, uint16_t field, int64_t ts, int status, int64_t value) {
    sample_t *s = sample(group, id, field, ts, status, 0);
    s->type = 'i', s->value.i64 = value;
}
API void fake_double(int group, uint32_t id, uint16_t field, int64_t ts, int status, double value) {
    sample_t *s = sample(group, id, field, ts, status, 0);
    s->type = 'd', s->value.dbl = value;
}
API void fake_text(int group, uint32_t id, uint16_t field, int64_t ts, int status, const char *value, int live_only) {
    sample_t *s = sample(group, id, field, ts, status, live_only);
    s->type = 's';
    snprintf(s->value.str, 256, "%s", value);
}
API void fake_xid(int group, uint32_t id, int64_t ts, int64_t xid) {
    xid_entities[xids_n].group = group, xid_entities[xids_n].id = id;
    value_v1_t *v = &xids[xids_n++];
    memset(v, 0, sizeof *v);
    v->version = VERSION(value_v1_t, 1), v->field = 230, v->type = 'i', v->ts = ts, v->value.i64 = xid;
}
API void fake_refuse(uint16_t field, int code) { refused[refused_n] = field, refused_code[refused_n++] = code; }
API void fake_gpu_link(uint32_t gpu, int link, int state) {
    links.gpus[gpu].id = gpu, links.gpus[gpu].states[link] = state;
    if (gpu >= links.gpus_n) links.gpus_n = gpu + 1;
}
API void fake_switch(uint32_t id) { switches[switches_n++] = id; }
API void fake_switch_link(uint32_t id, int link, int state) {
    uint32_t i = 0;
    while (i < links.switches_n && links.switches[i].id != id) i++;
    if (i == links.switches_n) links.switches[links.switches_n++].id = id;
    links.switches[i].states[link] = state;
}
API void fake_peer(uint32_t gpu, uint32_t peer, int state) {
    p2p.gpus[gpu].id = gpu, p2p.gpus[gpu].states[peer] = state;
    if (gpu >= p2p.gpus_n) p2p.gpus_n = gpu + 1;
}
API void fake_cpu(uint32_t id, int core) {
    uint32_t i = 0;
    while (i < cpus.count && cpus.cpus[i].id != id) i++;
    if (i == cpus.count) cpus.cpus[cpus.count++].id = id;
    cpus.cpus[i].cores.bits[core / 64] |= 1ull << (core % 64);
}
API void fake_incident(uint32_t gpu, uint32_t system, int result, uint32_t code) {
    incident_t *i = &health.incidents[health.count++];
    i->system = system, i->health = result, i->code = code, i->entity.group = 1, i->entity.id = gpu;
}
API int fake_told(const char *what) {
    if (!strcmp(what, "severity")) return severity;
    if (!strcmp(what, "is_unix")) return address_is_unix;
    if (!strcmp(what, "persist")) return persist;
    if (!strcmp(what, "initialised")) return initialised;
    if (!strcmp(what, "alive")) return alive;
    if (!strcmp(what, "tries")) return tries;
    if (!strcmp(what, "watches")) return watches_n;
    if (!strcmp(what, "largest_group")) return largest_group;
    if (!strcmp(what, "groups_made")) return groups_made;
    if (!strcmp(what, "field_groups_made")) return field_groups_made;
    if (!strcmp(what, "updates")) return updates;
    if (!strcmp(what, "reads")) return reads;
    if (!strcmp(what, "live_reads")) return live_reads;
    int n = 0;
    if (!strcmp(what, "groups")) for (int i = 1; i < 65; i++) n += groups[i].used;
    if (!strcmp(what, "field_groups")) for (int i = 1; i < 65; i++) n += field_groups[i].used;
    return n;
}
API const char *fake_address(void) { return address; }
API double fake_watch(uint16_t field, const char *what) {
    for (int w = 0; w < watches_n; w++) {
        field_group_t *f = &field_groups[watches[w].fields];
        for (int i = 0; i < f->n; i++)
            if (f->fields[i] == field)
                return !strcmp(what, "every") ? watches[w].every_us / 1e6 : !strcmp(what, "keep") ? watches[w].keep : !strcmp(what, "most") ? watches[w].most : 1;
    }
    return -1;
}

/* -- what podgpu calls ------------------------------------------------------------------------------------------ */

static int lacks(const char *name) { return !strcmp(missing, name); }
/* Handles have the size of a pointer, so a client that passes them as 32 bits must fail. */
#define WIDE ((uintptr_t)1 << 40)
static int check(uintptr_t handle) {
    if (!initialised) return UNINITIALIZED;
    return alive && handle == (WIDE | (uintptr_t)connection) ? OK : CONNECTION_NOT_VALID;
}
#define LIVE_CALL(name) \
    int code = check(handle); \
    if (code) return code; \
    if (lacks(name)) return FUNCTION_NOT_FOUND

API int dcgmInit(void) { initialised++; return OK; }
API int dcgmShutdown(void) { if (!initialised) return UNINITIALIZED; initialised--; return OK; }
static int tell_version(version_info_t *info, const char *version) {
    if (info->version != VERSION(version_info_t, 2)) return VER_MISMATCH;
    snprintf(info->text, sizeof info->text, "version:%s;arch:x86_64;buildtype:Release;builddate:2026-01-01", version);
    return OK;
}
API int dcgmVersionInfo(version_info_t *info) { return tell_version(info, library_version); }
API int dcgmHostengineVersionInfo(uintptr_t handle, version_info_t *info) {
    LIVE_CALL("dcgmHostengineVersionInfo");
    return tell_version(info, engine_version);
}
static int begin(uintptr_t *handle, int code) {
    if (!initialised) return UNINITIALIZED;
    tries++;
    if (code) return code;
    forget_groups();
    alive = 1;
    *handle = WIDE | (uintptr_t)++connection;
    return OK;
}
API int dcgmStartEmbedded_v2(embedded_v1_t *p) {
    if (p->version != VERSION(embedded_v1_t, 1)) return VER_MISMATCH;
    severity = p->severity;
    return p->mode == 1 ? begin(&p->handle, embedded_code) : BADPARAM;
}
API int dcgmConnect_v2(const char *where, connect_v2_t *p, uintptr_t *handle) {
    if (p->version != VERSION(connect_v2_t, 2)) return VER_MISMATCH;
    snprintf(address, sizeof address, "%s", where);
    address_is_unix = p->is_unix, persist = p->persist;
    return begin(handle, connect_code);
}
static int end(uintptr_t handle) {
    int code = check(handle);
    alive = 0;
    forget_groups();
    return code;
}
API int dcgmStopEmbedded(uintptr_t handle) { return end(handle); }
API int dcgmDisconnect(uintptr_t handle) { return end(handle); }
API int dcgmGetAllDevices(uintptr_t handle, uint32_t ids[32], int *count) {
    LIVE_CALL("dcgmGetAllDevices");
    for (uint32_t i = 0; i < gpus_n; i++) ids[i] = i;
    *count = (int)gpus_n;
    return OK;
}
API int dcgmGetGpuStatus(uintptr_t handle, uint32_t gpu, int *state) {
    LIVE_CALL("dcgmGetGpuStatus");
    *state = (int)states[gpu];
    return OK;
}
API int dcgmGetDeviceAttributes(uintptr_t handle, uint32_t gpu, attributes_t *out) {
    LIVE_CALL("dcgmGetDeviceAttributes");
    if (out->version != VERSION(attributes_t, 3)) return VER_MISMATCH;
    if (gpu >= gpus_n) return BADPARAM;
    uint32_t version = out->version;
    *out = gpus[gpu];
    out->version = version;
    return OK;
}
API int dcgmGetEntityGroupEntities(uintptr_t handle, int group, uint32_t *ids, int *count, uint32_t flags) {
    LIVE_CALL("dcgmGetEntityGroupEntities");
    (void)flags;
    uint32_t n = group == 3 ? switches_n : 0;
    if ((uint32_t)*count < n) return -31;
    memcpy(ids, switches, n * sizeof *ids);
    *count = (int)n;
    return OK;
}
API int dcgmGetGpuInstanceHierarchy(uintptr_t handle, mig_t *out) {
    LIVE_CALL("dcgmGetGpuInstanceHierarchy");
    if (out->version != VERSION(mig_t, 2)) return VER_MISMATCH;
    out->count = migs.count;
    memcpy(out->entries, migs.entries, sizeof migs.entries);
    return OK;
}
API int dcgmGetNvLinkLinkStatus(uintptr_t handle, links_v4_t *out) {
    LIVE_CALL("dcgmGetNvLinkLinkStatus");
    if (out->version != VERSION(links_v4_t, 4)) return VER_MISMATCH;
    uint32_t version = out->version;
    *out = links;
    out->version = version;
    return OK;
}
API int dcgmGetNvLinkP2PStatus(uintptr_t handle, p2p_t *out) {
    LIVE_CALL("dcgmGetNvLinkP2PStatus");
    if (out->version != VERSION(p2p_t, 1)) return VER_MISMATCH;
    uint32_t version = out->version;
    *out = p2p;
    out->version = version;
    return OK;
}
API int dcgmGetCpuHierarchy(uintptr_t handle, cpu_hierarchy_t *out) {
    LIVE_CALL("dcgmGetCpuHierarchy");
    if (out->version != VERSION(cpu_hierarchy_t, 1)) return VER_MISMATCH;
    if (!cpus.count) return NOT_SUPPORTED;
    uint32_t version = out->version;
    *out = cpus;
    out->version = version;
    return OK;
}
API int dcgmGroupCreate(uintptr_t handle, int type, const char *name, uintptr_t *out) {
    LIVE_CALL("dcgmGroupCreate");
    if (type != 1 || !name[0]) return BADPARAM;
    for (int i = 1; i < 65; i++)
        if (!groups[i].used) {
            groups[i].used = 1, groups[i].n = 0, groups_made++;
            *out = (uintptr_t)i;
            return OK;
        }
    return MAX_LIMIT;
}
API int dcgmGroupDestroy(uintptr_t handle, uintptr_t group) {
    LIVE_CALL("dcgmGroupDestroy");
    if (group < 1 || group > 64 || !groups[group].used) return BADPARAM;
    groups[group].used = 0;
    return OK;
}
API int dcgmGroupAddEntity(uintptr_t handle, uintptr_t group, int kind, uint32_t id) {
    LIVE_CALL("dcgmGroupAddEntity");
    if (group < 1 || group > 64 || !groups[group].used) return BADPARAM;
    group_t *g = &groups[group];
    if (g->n == 64) return MAX_LIMIT;
    g->entities[g->n].group = kind, g->entities[g->n++].id = id;
    return OK;
}
API int dcgmFieldGroupCreate(uintptr_t handle, int n, uint16_t *ids, const char *name, uintptr_t *out) {
    LIVE_CALL("dcgmFieldGroupCreate");
    if (n < 1 || n > 128 || !name[0]) return BADPARAM;
    for (int i = 0; i < n; i++)
        if (ids[i] == 0) return UNKNOWN_FIELD;
    for (int i = 1; i < 65; i++)
        if (!field_groups[i].used) {
            field_groups[i].used = 1, field_groups[i].n = n, field_groups_made++;
            memcpy(field_groups[i].fields, ids, (size_t)n * sizeof *ids);
            if (n > largest_group) largest_group = n;
            *out = (uintptr_t)i;
            return OK;
        }
    return MAX_LIMIT;
}
API int dcgmFieldGroupDestroy(uintptr_t handle, uintptr_t fields) {
    LIVE_CALL("dcgmFieldGroupDestroy");
    if (fields < 1 || fields > 64 || !field_groups[fields].used) return BADPARAM;
    field_groups[fields].used = 0;
    return OK;
}
API int dcgmWatchFields(uintptr_t handle, uintptr_t group, uintptr_t fields, int64_t every, double keep, int32_t most) {
    LIVE_CALL("dcgmWatchFields");
    if (group > 64 || !groups[group].used || fields > 64 || !field_groups[fields].used || every <= 0) return BADPARAM;
    for (int i = 0; i < field_groups[fields].n; i++)
        for (int r = 0; r < refused_n; r++)
            if (field_groups[fields].fields[i] == refused[r]) return refused_code[r];
    watch_t w = {(int)group, (int)fields, every, keep, most};
    watches[watches_n++] = w;
    return OK;
}
API int dcgmUnwatchFields(uintptr_t handle, uintptr_t group, uintptr_t fields) {
    LIVE_CALL("dcgmUnwatchFields");
    for (int w = 0; w < watches_n; w++)
        if (watches[w].group == (int)group && watches[w].fields == (int)fields) {
            watches[w] = watches[--watches_n];
            return OK;
        }
    return BADPARAM;
}
API int dcgmUpdateAllFields(uintptr_t handle, int wait) {
    LIVE_CALL("dcgmUpdateAllFields");
    (void)wait;
    updates++;
    return OK;
}
static int is_watched(pair_t entity, uint16_t field) {
    for (int w = 0; w < watches_n; w++) {
        group_t *g = &groups[watches[w].group];
        field_group_t *f = &field_groups[watches[w].fields];
        for (int e = 0; e < g->n; e++)
            for (int i = 0; i < f->n; i++)
                if (g->entities[e].group == entity.group && g->entities[e].id == entity.id && f->fields[i] == field)
                    return 1;
    }
    return 0;
}
static void put(value_v2_t *out, pair_t entity, uint16_t field, int live) {
    memset(out, 0, sizeof *out);
    out->version = VERSION(value_v2_t, 2);
    out->group = entity.group, out->id = entity.id, out->field = field, out->type = 'i';
    out->value.i64 = 0x7ffffffffffffff0ll;
    out->status = live || is_watched(entity, field) ? NO_DATA : NOT_WATCHED;
    if (out->status == NOT_WATCHED) return;
    for (int i = 0; i < samples_n; i++) {
        sample_t *s = &samples[i];
        if (s->entity.group != entity.group || s->entity.id != entity.id || s->field != field) continue;
        if (s->live_only && !live) continue;
        out->type = s->type, out->status = s->status, out->ts = s->ts, out->value = s->value;
    }
}
/* Last entity and field first: nobody promised an order. */
API int dcgmEntitiesGetLatestValues(uintptr_t handle, pair_t *entities, uint32_t n, uint16_t *fields, uint32_t fields_n,
                                    uint32_t flags, value_v2_t *out) {
    LIVE_CALL("dcgmEntitiesGetLatestValues");
    if (!n || n > 64 || !fields_n || fields_n > 128) return BADPARAM;
    reads++, live_reads += flags & 1;
    for (uint32_t e = n; e-- > 0;)
        for (uint32_t f = fields_n; f-- > 0;) put(out++, entities[e], fields[f], flags & 1);
    return OK;
}
typedef int (*on_values_t)(int32_t, uint32_t, value_v1_t *, int32_t, void *);
API int dcgmGetValuesSince_v2(uintptr_t handle, uintptr_t group, uintptr_t fields, int64_t since, int64_t *next,
                              on_values_t tell, void *user) {
    LIVE_CALL("dcgmGetValuesSince_v2");
    if (group > 64 || !groups[group].used || fields > 64 || !field_groups[fields].used) return BADPARAM;
    for (int i = 0; i < xids_n; i++)
        if (xids[i].ts >= since && is_watched(xid_entities[i], 230))
            if (tell(xid_entities[i].group, xid_entities[i].id, &xids[i], 1, user)) break;
    *next = since;
    return OK;
}
API int dcgmHealthSet(uintptr_t handle, uintptr_t group, uint32_t systems) {
    LIVE_CALL("dcgmHealthSet");
    if (group > 64 || !groups[group].used) return BADPARAM;
    health_set = systems != 0;
    return OK;
}
API int dcgmHealthCheck(uintptr_t handle, uintptr_t group, void *out) {
    LIVE_CALL("dcgmHealthCheck");
    if (group > 64 || !groups[group].used || !health_set) return BADPARAM;
    if (library_version[0] == '3') {
        health_v4_t *v4 = out;
        if (v4->version != VERSION(health_v4_t, 4)) return VER_MISMATCH;
        v4->count = health.count;
        memcpy(v4->incidents, health.incidents, sizeof v4->incidents);
        return OK;
    }
    health_v5_t *v5 = out;
    if (v5->version != VERSION(health_v5_t, 5)) return VER_MISMATCH;
    v5->count = health.count;
    memcpy(v5->incidents, health.incidents, sizeof v5->incidents);
    return OK;
}

/* -- sizes, to hold against what ctypes makes of them ------------------------------------------------------------- */

#define SIZE(name, type) if (!strcmp(what, name)) return (int)sizeof(type)
API int fake_size(const char *what) {
    SIZE("ConnectV2Params", connect_v2_t);
    SIZE("StartEmbeddedV2Params", embedded_v1_t);
    SIZE("VersionInfo", version_info_t);
    SIZE("FieldPayload", payload_t);
    SIZE("FieldValueV1", value_v1_t);
    SIZE("FieldValueV2", value_v2_t);
    SIZE("EntityPair", pair_t);
    SIZE("MigEntry", mig_entry_t);
    SIZE("MigHierarchy", mig_t);
    SIZE("Identifiers", identifiers_t);
    SIZE("DeviceAttributes", attributes_t);
    SIZE("Incident", incident_t);
    SIZE("HealthResponseV4", health_v4_t);
    SIZE("HealthResponseV5", health_v5_t);
    SIZE("GpuLinks", gpu_links_t);
    SIZE("SwitchLinks", switch_links_t);
    SIZE("NvLinkStatus", links_v4_t);
    SIZE("GpuPeers", peers_t);
    SIZE("NvLinkP2PStatus", p2p_t);
    SIZE("OwnedCores", owned_cores_t);
    SIZE("CpuCores", cpu_t);
    SIZE("CpuHierarchy", cpu_hierarchy_t);
    return -1;
}
