# One object library per instruction set from the same sources. They include neither PyTorch nor inline functions of the
# standard library: a copy compiled with wide instructions must never be the one that the linker keeps for others.

# Contraction makes fused multiply-adds; nothing else of IEEE arithmetic is given up.
set(H2O_ISA_FLAGS -ffp-contract=fast -fno-math-errno)
# Sanitizers make kernels slow whatever else is done, and compiling them at -O3 takes several times as long.
if(H2O_SANITIZE)
  list(PREPEND H2O_ISA_FLAGS -O1)
else()
  list(PREPEND H2O_ISA_FLAGS -O3)
endif()
set(H2O_ISA_FLAGS_scalar "")
set(H2O_ISA_FLAGS_avx2 -mavx2 -mfma -mf16c)
set(H2O_ISA_FLAGS_avx512 ${H2O_ISA_FLAGS_avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512)
set(H2O_ISA_FLAGS_avx512_bf16 ${H2O_ISA_FLAGS_avx512} -mavx512bf16)
set(H2O_ISA_FLAGS_neon "")
set(H2O_ISA_FLAGS_neon_bf16 -march=armv8.2-a+bf16)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(H2O_ISAS scalar avx2 avx512 avx512_bf16)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
  set(H2O_ISAS neon neon_bf16)
else()
  set(H2O_ISAS scalar)
endif()

# Adds the objects of every instruction set to a target.
function(h2o_add_isa_objects target)
  foreach(isa IN LISTS H2O_ISAS)
    add_library(${target}_${isa} OBJECT ${ARGN})
    target_compile_features(${target}_${isa} PRIVATE cxx_std_20)
    target_compile_definitions(${target}_${isa} PRIVATE H2O_ISA=${isa})
    target_compile_options(${target}_${isa} PRIVATE ${H2O_ISA_FLAGS} ${H2O_WARNINGS} ${H2O_ISA_FLAGS_${isa}})
    target_include_directories(${target}_${isa} PRIVATE ${PROJECT_SOURCE_DIR}/csrc)
    set_target_properties(${target}_${isa} PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${target}_${isa}>)
  endforeach()
  if("avx2" IN_LIST H2O_ISAS)
    target_compile_definitions(${target} PRIVATE H2O_HAVE_X86_ISAS)
  endif()
endfunction()
