/* psa_pack_qkv in C without any library: reads a case of format "bin" from one folder, writes its output to another.
 *
 *     cc -O2 -o psa_pack_qkv psa_pack_qkv.c
 *     numba-psa fuzz --op psa_pack_qkv --exec './psa_pack_qkv {in} {out}'
 *
 * -DSWAP_LO_HI and -DSECTION_MAJOR plant a bug each, for the diagnosis to name.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *read_all(const char *folder, const char *name, size_t *size) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "rb");
    if (!file) { fprintf(stderr, "cannot open %s\n", path); exit(1); }
    fseek(file, 0, SEEK_END);
    *size = (size_t)ftell(file);
    rewind(file);
    char *data = calloc(*size + 1, 1);
    if (!data || fread(data, 1, *size, file) != *size) { fprintf(stderr, "cannot read %s\n", path); exit(1); }
    fclose(file);
    return data;
}

/* The text after "key": that comes after `from`. */
static const char *find(const char *from, const char *key) {
    const char *found = from ? strstr(from, key) : NULL;
    if (!found) { fprintf(stderr, "no %s in the manifest\n", key); exit(1); }
    return found + strlen(key);
}

int main(int argc, char **argv) {
    if (argc != 3) { fprintf(stderr, "usage: %s IN OUT\n", argv[0]); return 2; }
    size_t size, bytes;
    const char *manifest = read_all(argv[1], "manifest.json", &size);
    const char *input = find(manifest, "\"name\": \"qkv\"");
    size_t heads = strtoul(find(manifest, "\"num_heads\":"), NULL, 10), shape[4];
    const char *p = find(find(input, "\"shape\":"), "[");
    for (int i = 0; i < 4; i++, p++) shape[i] = strtoul(p, (char **)&p, 10), p += strspn(p, " \n");
    const char *type = find(input, "\"dtype\": \"");
    size_t item = strncmp(type, "float32", 7) == 0 ? 4 : strncmp(type, "float64", 7) == 0 ? 8 : 2;

    const char *qkv = read_all(argv[1], "input.qkv.bin", &bytes);
    size_t B = shape[0], N = shape[2] * shape[3], KD = shape[1] / (4 * heads);
    if (bytes != B * shape[1] * N * item) { fprintf(stderr, "input.qkv.bin has %zu bytes\n", bytes); return 1; }
    char *packed = calloc(bytes + 1, 1), path[4096];
    for (size_t s = 0; s < 4; s++)
        for (size_t b = 0; b < B; b++)
            for (size_t h = 0; h < heads; h++)
                for (size_t n = 0; n < N; n++)
                    for (size_t d = 0; d < KD; d++) {
#if defined SWAP_LO_HI
                        size_t channel = (h * 4 + (s < 2 ? s : 5 - s)) * KD + d;
#elif defined SECTION_MAJOR
                        size_t channel = (s * heads + h) * KD + d;
#else
                        size_t channel = (h * 4 + s) * KD + d;
#endif
                        size_t from = (b * shape[1] + channel) * N + n;
                        size_t to = ((s * B * heads + b * heads + h) * N + n) * KD + d;
                        memcpy(packed + to * item, qkv + from * item, item);
                    }
    snprintf(path, sizeof path, "%s/output.packed.bin", argv[2]);
    FILE *out = fopen(path, "wb");
    if (!out || fwrite(packed, 1, bytes, out) != bytes || fclose(out)) { fprintf(stderr, "cannot write %s\n", path); return 1; }
    return 0;
}
