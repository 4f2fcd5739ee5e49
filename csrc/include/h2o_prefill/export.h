// Symbol visibility of the shared library: everything is hidden that is not marked H2O_API.
#pragma once

#define H2O_API __attribute__((visibility("default")))
