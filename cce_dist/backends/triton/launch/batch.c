/* Runs recorded steps by the CUDA driver: launches of kernels, zeros, and waits between streams.
 *
 * Nothing that a play writes outlives the call, so that several threads may run the same steps.
 * The driver's functions are passed in: nothing is linked.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda.h>
#include <stdint.h>
#include <string.h>

/* driver.py has the same numbers, and the same structures. */
enum { LAUNCH, ZERO, WAIT };
enum { NO_CONTEXT = -1 }; /* this thread has none, and nothing was run */
enum { MOST_BYTES = 4096, MOST_PARAMETERS = 512, ALIGNMENT = 128 };

typedef struct {
    CUresult (*get_context)(CUcontext *);
    CUresult (*launch)(const CUlaunchConfig *, CUfunction, void **, void **);
    CUresult (*replace_address)(CUtensorMap *, void *);
    CUresult (*zero)(CUdeviceptr, unsigned char, size_t, CUstream);
    CUresult (*record)(CUevent, CUstream);
    CUresult (*wait)(CUstream, CUevent, unsigned int);
} Driver;

/* An address within one of the play's tensors. */
typedef struct {
    int32_t base; /* the tensor's number */
    int32_t at;   /* LAUNCH: the byte of the parameters that gets it */
    int64_t offset;
} Address;

typedef struct {
    int32_t kind;
    int32_t stream;
    int32_t other; /* WAIT: the stream that is waited for */
    int32_t num_parameters;
    int32_t num_addresses;
    int32_t num_descriptors; /* the last ones of the addresses are those of descriptors */
    int64_t num_bytes;       /* LAUNCH: of the parameters; ZERO: of the memory */
    CUfunction function;
    const CUlaunchConfig *config; /* without its stream */
    const char *bytes;            /* the parameters, without addresses */
    const int32_t *starts;        /* of each parameter */
    const Address *addresses;
} Step;

static CUresult launch(const Driver *driver, const Step *step, const uint64_t *bases,
                       CUstream stream) {
    _Alignas(ALIGNMENT) char bytes[MOST_BYTES];
    void *parameters[MOST_PARAMETERS];
    memcpy(bytes, step->bytes, step->num_bytes);
    for (int i = 0; i < step->num_parameters; i++)
        parameters[i] = bytes + step->starts[i];
    for (int i = 0; i < step->num_addresses; i++) {
        const Address *to = &step->addresses[i];
        uint64_t address = bases[to->base] + to->offset;
        if (i < step->num_addresses - step->num_descriptors) {
            memcpy(bytes + to->at, &address, sizeof address);
            continue;
        }
        CUtensorMap *descriptor = (CUtensorMap *)(bytes + to->at);
        CUresult code = driver->replace_address(descriptor, (void *)address);
        if (code)
            return code;
    }
    CUlaunchConfig config = *step->config;
    config.hStream = stream;
    return driver->launch(&config, step->function, parameters, NULL);
}

static CUresult run_step(const Driver *driver, const Step *step, const uint64_t *bases,
                         const uint64_t *streams, CUevent event) {
    CUstream stream = (CUstream)streams[step->stream];
    if (step->kind == LAUNCH)
        return launch(driver, step, bases, stream);
    if (step->kind == ZERO) {
        const Address *from = step->addresses;
        return driver->zero(bases[from->base] + from->offset, 0, step->num_bytes, stream);
    }
    /* The event may be recorded again as soon as the stream's wait is in order. */
    CUresult code = driver->record(event, (CUstream)streams[step->other]);
    return code ? code : driver->wait(stream, event, 0);
}

static PyObject *run(PyObject *self, PyObject *args) {
    unsigned long long driver, steps, bases, streams, event;
    int count;
    if (!PyArg_ParseTuple(args, "KKiKKK", &driver, &steps, &count, &bases, &streams, &event))
        return NULL;
    CUcontext context = NULL;
    CUresult code = ((const Driver *)driver)->get_context(&context);
    if (!code && !context)
        return PyLong_FromLong(NO_CONTEXT);
    /* A full queue of launches blocks, and another thread's launch may have to empty it. */
    Py_BEGIN_ALLOW_THREADS;
    for (int i = 0; i < count && !code; i++)
        code = run_step((const Driver *)driver, (const Step *)steps + i, (const uint64_t *)bases,
                        (const uint64_t *)streams, (CUevent)event);
    Py_END_ALLOW_THREADS;
    return PyLong_FromLong(code);
}

static PyMethodDef methods[] = {
    {"run", run, METH_VARARGS, "Returns the driver's code, 0 or that of the step that failed, or NO_CONTEXT."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "cce_dist_batch", NULL, -1, methods};

PyMODINIT_FUNC PyInit_cce_dist_batch(void) { return PyModule_Create(&module); }
