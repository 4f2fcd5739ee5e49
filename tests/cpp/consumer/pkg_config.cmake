# cmake -P: main.cpp, compiled, linked and run with the flags that pkg-config gives.
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
execute_process(COMMAND ${CXX_COMPILER} "${CMAKE_CURRENT_LIST_DIR}/main.cpp" ${flags} -o ${MOVED}/consumer
                        COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${MOVED}/consumer COMMAND_ERROR_IS_FATAL ANY)
