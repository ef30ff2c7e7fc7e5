#pragma once
// A process whose locale writes 1,5 and 1.000: made here by glibc's `localedef`, which needs no
// root and no locale package.

#include <clocale>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <locale>
#include <string>

#include "temp_folder.hpp"

namespace test {

/// Numbers of iostreams as the C locale below has them.
struct CommaNumbers : std::numpunct<char> {
  [[nodiscard]] char do_decimal_point() const override { return ','; }
  [[nodiscard]] char do_thousands_sep() const override { return '.'; }
  [[nodiscard]] std::string do_grouping() const override { return "\3"; }
};

/// In force while it lives, for C and for C++.
class CommaLocale {
 public:
  CommaLocale() {
    {
      std::ofstream map(folder_ / "charmap");
      map << "<code_set_name> ASCII-OF-THIS-TEST\n<mb_cur_max> 1\nCHARMAP\n";
      for (int c = 0; c < 128; ++c) {
        char line[64];
        (void)std::snprintf(line, sizeof line, "<U%04X> /x%02x character\n", c, c);
        map << line;
      }
      map << "END CHARMAP\n";
      std::ofstream source(folder_ / "source");
      source
          << "comment_char %\nescape_char /\nLC_NUMERIC\ndecimal_point \",\"\nthousands_sep \".\"\n"
             "grouping 3;3\nEND LC_NUMERIC\n";
    }
    // Its status is about the categories that are left out; whether it worked, setlocale says.
    const std::string make = "localedef -c -i '" + (folder_ / "source") + "' -f '" +
                             (folder_ / "charmap") + "' '" + (folder_ / "comma") +
                             "' >/dev/null 2>&1";
    [[maybe_unused]] const int status = std::system(make.c_str());
    ::setenv("LOCPATH", folder_.path().c_str(), 1);
    for (const char* name : {"comma", "de_DE.UTF-8", "fr_FR.UTF-8", "ru_RU.UTF-8"}) {
      if (std::setlocale(LC_ALL, name) == nullptr) continue;
      char text[16];
      (void)std::snprintf(text, sizeof text, "%.1f", 1.5);
      works_ = std::string(text) == "1,5";
      if (works_) break;
    }
    ::unsetenv("LOCPATH");
    before_ = std::locale::global(std::locale(std::locale(), new CommaNumbers));
  }
  CommaLocale(const CommaLocale&) = delete;
  CommaLocale& operator=(const CommaLocale&) = delete;
  ~CommaLocale() {
    std::locale::global(before_);
    (void)std::setlocale(LC_ALL, "C");
  }
  /// What a test needs before anything else: a comma is written now, or the whole test is skipped
  /// and says so.
  void require() const {
    if (works_) return;
    std::puts(
        "skipped: neither localedef nor an installed locale gives a decimal comma (Debian: "
        "libc-bin, locales)");
    std::exit(77);
  }

 private:
  TempFolder folder_;
  std::locale before_;
  bool works_ = false;
};

}  // namespace test
