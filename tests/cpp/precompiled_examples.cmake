# What the project of the examples includes when the tests build it: programs that use one of everything in the installed
# package, and headers of PyTorch that all of them parse once.
set(h2o_tests "${CMAKE_CURRENT_LIST_DIR}")
function(h2o_share_headers)
  add_executable(consumer "${h2o_tests}/consumer/main.cpp")
  target_link_libraries(consumer PRIVATE H2OPrefill::h2o_prefill)
  # Others define macros besides, which these headers do not know.
  target_precompile_headers(consumer PRIVATE <ATen/ATen.h> <torch/custom_class.h>)
  if(NOT H2OPrefill_text_FOUND)
    return()
  endif()
  # Once more, as by another part of the project.
  find_package(H2OPrefill REQUIRED COMPONENTS text)
  find_package(GTest REQUIRED)
  add_executable(tokenizer_tests "${h2o_tests}/runtime/test_tokenizer.cpp")
  target_link_libraries(tokenizer_tests PRIVATE H2OPrefill::text GTest::gtest_main)
  foreach(target generate tokenizer_tests)
    target_precompile_headers(${target} REUSE_FROM consumer)
  endforeach()
endfunction()
cmake_language(DEFER CALL h2o_share_headers)
