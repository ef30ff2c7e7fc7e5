#pragma once

#include <cstdio>
#include <span>
#include <string>
#include <string_view>

#include <kvmeld/codec/file_bytes.hpp>
#include <kvmeld/metrics/metrics_page.hpp>

KVMELD_NAMESPACE_BEGIN

namespace detail {

inline void append_escaped(std::string& out, std::string_view text, bool quoted) {
  for (const char c : text) {
    if (c == '\\')
      out += "\\\\";
    else if (c == '\n')
      out += "\\n";
    else if (c == '"' && quoted)
      out += "\\\"";
    else
      out += c;
  }
}

}  // namespace detail

/// What a server of metrics says of its text: `Content-Type`.
inline constexpr std::string_view prometheus_content_type =
    "text/plain; version=0.0.4; charset=utf-8";

/// A page in Prometheus' text exposition format, version 0.0.4: families one after the other, each
/// behind its HELP and TYPE.
KVMELD_LAZY [[nodiscard]] std::string prometheus_text(const MetricsPage& page) {
  std::string out;
  for (const MetricFamily& family : page.families()) {
    out += "# HELP " + family.name + ' ';
    detail::append_escaped(out, family.help, false);
    out += "\n# TYPE " + family.name + ' ';
    out += to_string(family.type);
    out += '\n';
    for (const MetricSample& sample : family.samples) {
      out += family.name + sample.suffix;
      char before = '{';
      for (const MetricLabel& label : sample.labels) {
        out += before + label.name + "=\"";
        detail::append_escaped(out, label.value, true);
        out += '"';
        before = ',';
      }
      if (before == ',') out += '}';
      out += ' ' + detail::metric_number(sample.value) + '\n';
    }
  }
  return out;
}

/// Puts a page where a collector of text files looks for it (node_exporter's wants `*.prom`):
/// readers find the old text or the new one, never a part. Written beside it as `PATH.new` first,
/// so a path has one writer.
///
/// Errors: `unavailable`; the old file stays.
KVMELD_LAZY [[nodiscard]] Status write_prometheus_file(const std::string& path,
                                                       const MetricsPage& page) {
  const std::string text = prometheus_text(page);
  const std::string beside = path + ".new";
  Status written =
      write_file_bytes(beside, std::as_bytes(std::span<const char>(text.data(), text.size())));
  if (written.ok() && std::rename(beside.c_str(), path.c_str()) != 0) {
    written =
        detail::error(ErrorCode::unavailable, "cannot put ", beside, " in the place of ", path);
  }
  if (!written.ok()) (void)std::remove(beside.c_str());
  return written;
}

KVMELD_NAMESPACE_END
