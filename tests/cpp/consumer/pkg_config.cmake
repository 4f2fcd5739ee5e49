# cmake -P: a program, compiled, linked and run with the flags that pkg-config gives.
if(NOT PKG_CONFIG)
  message("pkg-config is needed")
  return()
endif()
file(REMOVE_RECURSE ${MOVED})
file(COPY ${INSTALLED}/ DESTINATION ${MOVED})
file(GLOB_RECURSE description ${MOVED}/*/h2o_prefill.pc)
cmake_path(GET description PARENT_PATH folder)
set(ENV{PKG_CONFIG_PATH} ${folder})

function(ask result)
  execute_process(COMMAND ${PKG_CONFIG} ${ARGN} h2o_prefill OUTPUT_VARIABLE said OUTPUT_STRIP_TRAILING_WHITESPACE
                          COMMAND_ERROR_IS_FATAL ANY)
  set(${result} "${said}" PARENT_SCOPE)
endfunction()

ask(version --modversion)
if(NOT version STREQUAL VERSION)
  message(FATAL_ERROR "h2o_prefill.pc has version ${version}, expected ${VERSION}")
endif()
ask(flags --cflags --libs)
if(flags MATCHES "${INSTALLED}/")
  message(FATAL_ERROR "h2o_prefill.pc names the folder that it was moved from: ${flags}")
endif()
separate_arguments(flags UNIX_COMMAND "${CXX_FLAGS} ${flags}")
file(WRITE ${MOVED}/main.cpp [[
#include <ATen/ops/ones.h>
#include <h2o_prefill/library.h>
#include <h2o_prefill/version.h>
int main() {
  h2o_prefill::init();
  return at::ones({2}).size(0) == 2 && h2o_prefill::version() == H2O_PREFILL_VERSION ? 0 : 1;
}
]])
execute_process(COMMAND ${CXX_COMPILER} ${MOVED}/main.cpp ${flags} -o ${MOVED}/consumer
                        COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${MOVED}/consumer COMMAND_ERROR_IS_FATAL ANY)
