# Run by moesaic_embed_page: writes OUTPUT, a C++ file whose assembler directives include the files under FOLDERS, text also
# compressed with gzip (into PACKED). Files of lib/ have their version in the path and never change.
set(ends "\\.(html|css|svg|js|woff2|txt)$")
set(text_ends "\\.(html|css|svg|js|txt)$")
set(blocks "")
set(symbols "")
set(entries "")
set(index 0)
file(REMOVE_RECURSE ${PACKED})
file(MAKE_DIRECTORY ${PACKED})

# Appends the assembler's block for `file`; a change of the hash in its comment compiles the C++ file again.
macro(include_bytes file symbol)
  file(SHA256 ${file} hash)
  string(SUBSTRING ${hash} 0 16 hash)
  string(APPEND blocks "asm(\".section .rodata\\n${symbol}: .incbin \\\"${file}\\\"\\n${symbol}_end:\\n.previous\");  // ${hash}\n")
  string(APPEND symbols "extern const char ${symbol}[], ${symbol}_end[];\n")
endmacro()

foreach(folder ${FOLDERS})
  file(GLOB_RECURSE files LIST_DIRECTORIES false RELATIVE ${folder} ${folder}/*)
  list(SORT files)
  foreach(path ${files})
    if(NOT path MATCHES "${ends}" OR path MATCHES "node_modules/")
      continue()
    endif()
    set(symbol moesaic_web_file_${index})
    include_bytes(${folder}/${path} ${symbol})
    set(etag ${hash})
    set(gzip "{}")
    if(path MATCHES "${text_ends}")
      file(ARCHIVE_CREATE OUTPUT ${PACKED}/${index}.gz PATHS ${folder}/${path} FORMAT raw COMPRESSION GZip COMPRESSION_LEVEL 9 MTIME "1970-01-01 UTC")
      include_bytes(${PACKED}/${index}.gz ${symbol}_gzip)
      set(gzip "Text(${symbol}_gzip, ${symbol}_gzip_end)")
    endif()
    string(APPEND entries "    WebFile{\"${path}\", \"\\\"${etag}\\\"\", Text(${symbol}, ${symbol}_end), ${gzip}},\n")
    math(EXPR index "${index} + 1")
  endforeach()
endforeach()

file(WRITE ${OUTPUT} "#include \"server/web_files.h\"

#include <array>

${blocks}
extern \"C\" {
${symbols}}

namespace moesaic::server {
namespace {

std::string_view Text(const char* begin, const char* end) { return {begin, end}; }

}  // namespace

std::span<const WebFile> WebFiles() {
  static const std::array<WebFile, ${index}> files = {
${entries}  };
  return files;
}

}  // namespace moesaic::server
")
