// Python's indexing of a tensor on a CUDA device asks for the device's guard, which a torch without CUDA lacks.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>);
}
